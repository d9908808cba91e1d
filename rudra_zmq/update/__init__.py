"""The optimiser of the parameter server: rules, the pass that applies them, schedules and parameter groups.

Must not know: protocols, clocks, processes. It imports the standard library and NumPy alone,
and llvmlite where the host has it.
"""
