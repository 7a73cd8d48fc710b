"""Lightning callbacks: the suite's own, and the open group's."""
