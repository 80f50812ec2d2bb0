//! The hypercall: chunks of 32 elements, one flush each, preemption between.
//!
//! [`Call::run`] is the entry. It returns with nothing pending: each chunk is flushed
//! before the next begins and before the call is left, whatever ended it.

use zerocopy::{FromZeros, IntoBytes};

use crate::{
    abi::{
        Errno, GrantCopy, MapGrantRef, Operation, Status, SwapGrantRef, UnmapAndReplace,
        UnmapGrantRef,
    },
    copy::copy,
    domain::{BATCH, Domain, GuestAddress},
    map::{ROOM_FOR_MAP, map, take_back},
    release::{PinBatch, settle},
    setup,
    swap::swap,
    unmap::{Unmap, unmap},
};

/// Elements that share one flush, as a count.
const CHUNK: u32 = BATCH as u32;

/// A grant-table hypercall as the guest makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Operation and cookie.
    pub command: u32,
    /// Where the elements are.
    pub argument: GuestAddress,
    /// How many; negative as a signed number is invalid.
    pub count: u32,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the guest waits for the result, or for the call to continue"]
pub enum Outcome {
    /// All elements have a status: the result is 0.
    Done,
    /// Preempted with elements left: run this call when the vCPU next runs.
    Continue {
        /// How many elements of this call have a status.
        done: u32,
        /// The call for the others.
        rest: Call,
    },
    /// The call as a whole failed; elements before the failure have their status.
    Failed(Errno),
}

impl From<Result<(), Errno>> for Outcome {
    fn from(result: Result<(), Errno>) -> Self {
        match result {
            Ok(()) => Self::Done,
            Err(errno) => Self::Failed(errno),
        }
    }
}

impl Call {
    /// Carries out the call for `domain`.
    pub fn run<D: Domain>(self, domain: &D) -> Outcome {
        if self.count > i32::MAX as u32 {
            return Outcome::Failed(Errno::Invalid);
        }
        let operation = match Operation::from_command(self.command) {
            Ok(operation) => operation,
            Err(errno) => return Outcome::Failed(errno),
        };
        match operation {
            Operation::MapGrantRef => self.chunks::<MapGrantRef, D, CHUNK>(domain, map_element),
            Operation::UnmapGrantRef => {
                self.chunks::<UnmapGrantRef, D, CHUNK>(domain, unmap_element)
            }
            Operation::UnmapAndReplace => {
                self.chunks::<UnmapAndReplace, D, CHUNK>(domain, replace_element)
            }
            // These leave nothing for a common flush, so they can be left after each.
            Operation::Copy => self.chunks::<GrantCopy, D, 1>(domain, copy_element),
            Operation::SwapGrantRef => self.chunks::<SwapGrantRef, D, 1>(domain, swap_element),
            Operation::Transfer => Outcome::Failed(Errno::NotSupported),
            Operation::SetupTable => self.single(domain, setup::setup_table),
            Operation::QuerySize => self.single(domain, setup::query_size),
            Operation::GetStatusFrames => self.single(domain, setup::get_status_frames),
            Operation::SetVersion => setup::set_version(domain, self.argument).into(),
            Operation::GetVersion => setup::get_version(domain, self.argument).into(),
        }
    }

    /// An operation on exactly one element.
    fn single<D: Domain>(
        self,
        domain: &D,
        operation: impl FnOnce(&D, GuestAddress) -> Result<(), Errno>,
    ) -> Outcome {
        if self.count == 1 {
            operation(domain, self.argument).into()
        } else {
            Outcome::Failed(Errno::Invalid)
        }
    }

    /// Runs `element` over all elements of type `T`, in chunks of `N` that share one flush.
    #[inline]
    fn chunks<T, D: Domain, const N: u32>(
        self,
        domain: &D,
        element: impl Fn(&D, &mut PinBatch, GuestAddress) -> Result<(), Errno>,
    ) -> Outcome {
        let size = size_of::<T>() as u64;
        let mut batch = PinBatch::new(domain.id());
        let mut next = Some(self.argument);
        let mut left = self.count;
        while left > 0 {
            let end = left.saturating_sub(N);
            let mut result = Ok(());
            while left > end && result.is_ok() {
                result = next.ok_or(Errno::Fault).and_then(|at| element(domain, &mut batch, at));
                next = next.and_then(|at| at.offset(size));
                left -= 1;
            }
            // The flush comes first: a fault must not leave anything pending.
            if let Err(errno) = settle(domain, &mut batch).and(result) {
                return Outcome::Failed(errno);
            }
            if left > 0 && domain.preempt() {
                // Past the end of the space the call continues with a fault.
                let argument = next.unwrap_or(GuestAddress(u64::MAX));
                let done = self.count.saturating_sub(left);
                return Outcome::Continue { done, rest: Call { argument, count: left, ..self } };
            }
        }
        Outcome::Done
    }
}

fn map_element<D: Domain>(domain: &D, batch: &mut PinBatch, at: GuestAddress) -> Result<(), Errno> {
    if batch.left() < ROOM_FOR_MAP {
        settle(domain, batch)?;
    }
    let mut request = MapGrantRef::new_zeroed();
    read(domain, at, &mut request)?;
    map(domain, batch, &mut request);
    let told = domain.copy_to_guest(at, request.as_bytes());
    if told.is_err() {
        take_back(domain, batch, &request);
    }
    told.map_err(|_| Errno::Fault)?;
    // A failed map keeps its pin until the flush, and a domain's own page that is pinned is
    // taken for one that moved already: nothing may look at it before.
    if request.domain == domain.id().get() && request.status != Status::Okay.value() {
        settle(domain, batch)?;
    }
    Ok(())
}

#[inline]
fn unmap_element<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    at: GuestAddress,
) -> Result<(), Errno> {
    const STATUS: u64 = core::mem::offset_of!(UnmapGrantRef, status) as u64;
    let mut request = UnmapGrantRef::new_zeroed();
    read(domain, at, &mut request)?;
    let UnmapGrantRef { host_addr, dev_bus_addr: _, handle, status: _, padding: _ } = request;
    let status = unmap(domain, batch, Unmap { host_addr, handle, new_addr: 0 });
    write_status(domain, at, STATUS, status)
}

fn replace_element<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    at: GuestAddress,
) -> Result<(), Errno> {
    const STATUS: u64 = core::mem::offset_of!(UnmapAndReplace, status) as u64;
    let mut request = UnmapAndReplace::new_zeroed();
    read(domain, at, &mut request)?;
    let UnmapAndReplace { host_addr, new_addr, handle, status: _, padding: _ } = request;
    let status = unmap(domain, batch, Unmap { host_addr, handle, new_addr });
    write_status(domain, at, STATUS, status)
}

fn copy_element<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    at: GuestAddress,
) -> Result<(), Errno> {
    const STATUS: u64 = core::mem::offset_of!(GrantCopy, status) as u64;
    let mut request = GrantCopy::new_zeroed();
    read(domain, at, &mut request)?;
    // Both pages are given back by now: who sees the status sees no bit in use for it.
    let status = copy(domain, batch, &request)?;
    write_status(domain, at, STATUS, status)
}

fn swap_element<D: Domain>(domain: &D, _: &mut PinBatch, at: GuestAddress) -> Result<(), Errno> {
    const STATUS: u64 = core::mem::offset_of!(SwapGrantRef, status) as u64;
    let mut request = SwapGrantRef::new_zeroed();
    read(domain, at, &mut request)?;
    write_status(domain, at, STATUS, swap(domain, &request))
}

#[inline]
pub(crate) fn read<D: Domain>(
    domain: &D,
    at: GuestAddress,
    structure: &mut (impl IntoBytes + zerocopy::FromBytes),
) -> Result<(), Errno> {
    domain.copy_from_guest(at, structure.as_mut_bytes()).map_err(|_| Errno::Fault)
}

#[inline]
pub(crate) fn write_status<D: Domain>(
    domain: &D,
    structure: GuestAddress,
    offset: u64,
    status: Status,
) -> Result<(), Errno> {
    let at = structure.offset(offset).ok_or(Errno::Fault)?;
    domain.copy_to_guest(at, status.value().as_bytes()).map_err(|_| Errno::Fault)
}
