"""Text: labelled texts, their token states as examples, and streams of text tasks."""
