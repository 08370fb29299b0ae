"""What a step draws behind a chunk: nothing, one token, forks, a beam's candidates, drafts."""
