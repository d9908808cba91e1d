"""The command line ``rudra``: one file per family of commands.

Owns arguments, tables, exit statuses. Imports net, wire, config and head.registry (to read a finished run);
never torch, cupy, numpy or the machinery of a job: heavy verbs exec ``python -m rudra_zmq.<package>``.
"""
