"""From token ids to text: pieces that are safe to show, and where an answer stops."""
