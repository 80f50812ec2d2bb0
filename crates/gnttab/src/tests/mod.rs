//! Promises of the crate, on a domain, memory and hardware made for tests.

mod batching;
mod copies;
mod entries;
mod fake;
mod granted_copies;
mod handles;
mod lent;
mod life;
mod no_iommu;
mod statuses;
mod swaps;
mod tables;
mod verdicts;
