"""The two daemons, psd and learnerd. They spawn processes and reach neither node, update nor torch code."""
