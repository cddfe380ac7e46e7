"""The page of --report: a template and data; imported only where one is asked for."""
