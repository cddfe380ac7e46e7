"""What makes a conversion crash-safe: target folder, lock, journal, records, links."""
