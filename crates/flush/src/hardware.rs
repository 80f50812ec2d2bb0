//! How a batch asks hardware to forget: start every kind, then wait for all.

use arrayvec::ArrayVec;

use crate::{Cover, DomainId, Gone, Iotlb, Kind, Skipped};

/// Hardware that can be made to forget translations of one kind.
///
/// `start` and `wait` take `&self`, so that no lock has to be held while waiting.
pub trait Flush<K: Kind> {
    /// A flush under way. It holds the error of a start that failed.
    type InFlight;
    /// Why a flush is not known to have completed.
    type Error;

    /// Starts making the hardware forget `cover` of `domain`.
    ///
    /// It cannot fail: an error is kept in the token and comes out of [`wait`](Self::wait).
    /// A cover of nothing is never passed in. A [`Batch`](crate::Batch) makes every store to its
    /// entries visible before, to all CPUs; what else the hardware needs to see them, such as a
    /// write-back of CPU caches, belongs to the edit.
    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight;

    /// Waits until the hardware has forgotten.
    ///
    /// # Errors
    /// After an error any translation of the cover may still be in use.
    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error>;
}

impl<K: Kind, F: Flush<K>> Flush<K> for &F {
    type InFlight = F::InFlight;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        F::start(self, domain, cover)
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        F::wait(self, in_flight)
    }
}

/// One flusher for each kind. Adding a kind adds a field, and breaks all who forget it.
#[derive(Debug)]
pub struct Hardware<'a, T, I> {
    /// Flushes the CPUs' second-stage translations.
    pub tlb: &'a T,
    /// Flushes the devices' translations.
    pub iotlb: &'a I,
}

/// Several units that must all forget: each is started before any is waited for.
#[derive(Debug)]
pub struct Units<'a, U, const N: usize>(&'a [U]);

impl<'a, U, const N: usize> Units<'a, U, N> {
    /// All of `units`, or `None` if there are more than `N`, or none: a domain that no unit
    /// serves says so with [`NoIommu`], which does not pass for a flush.
    #[must_use]
    pub const fn new(units: &'a [U]) -> Option<Self> {
        if !units.is_empty() && units.len() <= N { Some(Self(units)) } else { None }
    }
}

/// The first unit that failed; all were waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitsError<E> {
    /// Its place in the slice.
    pub unit: usize,
    /// What it said.
    pub error: E,
}

impl<K: Kind, U: Flush<K>, const N: usize> Flush<K> for Units<'_, U, N> {
    type InFlight = ArrayVec<U::InFlight, N>;
    type Error = UnitsError<U::Error>;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        self.0.iter().map(|unit| unit.start(domain, cover)).collect()
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        let mut first = Ok(());
        for (place, (unit, token)) in self.0.iter().zip(in_flight).enumerate() {
            let result = unit.wait(token);
            if first.is_ok() {
                first = result.map_err(|error| UnitsError { unit: place, error });
            }
        }
        first
    }
}

/// The word of an embedder that no IOMMU can reach the domain's memory.
///
/// It is the only way to get a device half of the proof without an edit, and it does
/// not lie: as a [`Flush`] it fails whenever something was recorded for it.
#[derive(Clone, Copy, Debug)]
pub struct NoIommu;

impl NoIommu {
    /// The device half of the proof, for a domain that no device belongs to.
    pub fn gone<'id>(&self, skipped: &mut Skipped<'id>) -> Gone<'id, Iotlb> {
        skipped.absent()
    }
}

/// Something was recorded for the IOMMU that the embedder said does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedWithoutIommu;

impl Flush<Iotlb> for NoIommu {
    type InFlight = Result<(), RecordedWithoutIommu>;
    type Error = RecordedWithoutIommu;

    fn start(&self, _: DomainId, cover: &Cover) -> Self::InFlight {
        if cover.is_nothing() { Ok(()) } else { Err(RecordedWithoutIommu) }
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), RecordedWithoutIommu> {
        in_flight
    }
}
