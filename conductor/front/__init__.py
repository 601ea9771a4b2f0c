"""The Conductor's HTTP side: clients, engines and operators."""
