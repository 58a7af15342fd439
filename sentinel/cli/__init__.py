"""The verbs: `sentinel VERB`. Data to stdout, talk to stderr."""
