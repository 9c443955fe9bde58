"""/v1/files and /v1/batches: requests in a file, answers in a file, computed in the gaps of other traffic."""
