"""How a strategy shards parameters: layouts and strategies, without files."""
