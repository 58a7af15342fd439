"""Control: anomalies become commands, commands become files, ranks answer."""
