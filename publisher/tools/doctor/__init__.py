"""Why nothing arrives: probes that look, and judgements, without I/O, of what they saw."""

from publisher.tools.doctor.diagnosis import Finding, conclusion, exit_code, last_lines, lines
from publisher.tools.doctor.examination import Case, examine

__all__ = ["Case", "Finding", "conclusion", "examine", "exit_code", "last_lines", "lines"]
