"""Several nodes, played by namespaces of one machine."""
