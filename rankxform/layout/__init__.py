"""How a strategy cuts parameters: layouts and strategies, without files."""
