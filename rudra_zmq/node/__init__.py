"""The process that holds the weights of one job and applies updates."""
