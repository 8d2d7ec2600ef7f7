"""The process group, its collectives, and when a step starts them."""
