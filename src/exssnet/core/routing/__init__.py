"""Which learned task an input without a label belongs to: the paper's rules, and tasks run as one."""
