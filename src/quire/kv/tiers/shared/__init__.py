"""One host pool and one SSD folder for several processes, behind a server on a Unix socket."""
