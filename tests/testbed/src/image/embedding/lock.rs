//! One lock type for everything the crates ask a lock for.
//!
//! Interrupts are off in this image, but for the moments in which a waiting processor
//! takes kicks, whose handler takes no lock. A hypervisor that takes a unit's lock in its
//! fault handler as well has to turn them off inside [`Lock::with`].

use iommu_vtd::Guarded;
use spin::Mutex;

/// A value behind a spin lock.
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    /// An unlocked `value`.
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// The value, whose lock is not needed any more.
    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T> Guarded<T> for Lock<T> {
    fn with<R>(&self, action: impl FnOnce(&mut T) -> R) -> R {
        action(&mut self.0.lock())
    }
}
