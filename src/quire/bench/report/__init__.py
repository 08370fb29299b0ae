"""What a benchmark tells: tables, pictures, profiles, and the limits of the machine."""
