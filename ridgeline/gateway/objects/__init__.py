"""Objects kept upstream for a tenant: files, batches, stored responses, uploads."""
