"""Which model: rules, nearest examples, a classifier, a cascade; fitted and evaluated."""
