"""Which bytes go where: pure functions of strategies and indexes, the same on every process."""
