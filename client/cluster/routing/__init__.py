"""The choice of a replica for a request: by the pages and the load that the ranks tell, else by a hash of the prompt's
beginning. It opens no connection and starts no task."""
