"""The process group, its collectives, and the schedule that starts them in a step."""
