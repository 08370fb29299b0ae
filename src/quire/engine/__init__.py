"""What happens next: requests become sequences, sequences become steps, steps become text."""
