"""Examples of earlier tasks, kept and shown again."""
