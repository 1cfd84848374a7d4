"""How the project is deployed: images, compose, Kubernetes, monitoring. See docs/deployment.md."""
