"""The rules of the job, sans-IO: events in, actions out. Imports nothing of the rest."""
