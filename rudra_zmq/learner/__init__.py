"""The Python interface for training scripts, and the learner and evaluator processes. torch is imported here."""
