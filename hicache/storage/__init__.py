"""The third tier: pages that outlive the process, or that several workers share."""
