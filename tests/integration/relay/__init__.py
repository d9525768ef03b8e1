"""The relay between raw sockets: scripted engines on one side, scripted clients on the other."""
