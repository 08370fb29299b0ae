"""The SSD tier: block images in preallocated files that outlive the process, and a kill."""
