"""Lightning callbacks of scalewise, and the instantiation of user-defined ones."""
