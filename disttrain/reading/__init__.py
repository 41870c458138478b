"""Verbs that read a finished run: its record, and nothing else."""
