"""Measurements. Each prints what a figure is compared with, from the same run; none is a test."""
