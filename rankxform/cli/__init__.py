"""The command line: arguments, one call, a report."""
