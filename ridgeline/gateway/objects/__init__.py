"""Objects of a tenant that an upstream stores: files, batches, stored responses; and uploads."""
