//! Devices that can be told to read or write memory.
//!
//! A driver here hands the device exactly the bus addresses it is given; whether an
//! IOMMU lets them through, and to where, is the business of the case. Memory that a
//! device may write is reached through [`crate::memory::words`] only.

pub(crate) mod edu;
pub(crate) mod nvme;
