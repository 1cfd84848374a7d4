"""The Dockerfiles' instructions, carried out without Docker. For people: docker/build-by-hand.sh."""
