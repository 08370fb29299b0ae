"""Block images in a store that other machines see too; never needed, never waited for long."""
