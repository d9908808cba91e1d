"""The wire: messages, and how they become frames. Knows neither ``core`` nor ``net``."""
