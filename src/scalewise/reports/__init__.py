"""The offline page of a run or a sweep: one self-contained ``report.html``."""
