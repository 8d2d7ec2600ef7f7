"""The process group, its collectives, and the schedule that starts these collectives in a step."""
