"""Plan in, text and files for people out."""
