"""The Conductor over HTTP: clients that ask, engines that answer, operators that look."""
