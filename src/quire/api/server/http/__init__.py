"""HTTP below the routes: connections, hosts, bodies, request ids, clients that leave."""
