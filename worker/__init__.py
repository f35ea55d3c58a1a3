"""What both roles run in: control, the session with routers, the process."""
