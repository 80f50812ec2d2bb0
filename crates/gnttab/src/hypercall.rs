//! The hypercall: chunks of 32 elements, one flush each, preemption between.
//!
//! [`Call::run`] is the entry. It returns with nothing pending: each chunk is flushed
//! before the next begins and before the call is left, whatever ended it.

use zerocopy::{FromBytes, FromZeros, IntoBytes};

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
    together::unmap_together,
    unmap::{Handles, Unmaps, unmap},
    words::GuestWords,
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
            Operation::MapGrantRef => {
                self.chunks::<MapGrantRef, D, CHUNK>(domain, each::<MapGrantRef, D>(map_element))
            }
            Operation::UnmapGrantRef => {
                self.chunks::<UnmapGrantRef, D, CHUNK>(domain, unmap_chunk::<UnmapGrantRef, D>)
            }
            Operation::UnmapAndReplace => {
                self.chunks::<UnmapAndReplace, D, CHUNK>(domain, unmap_chunk::<UnmapAndReplace, D>)
            }
            // These leave nothing for a common flush, so they can be left after each.
            Operation::Copy => {
                self.chunks::<GrantCopy, D, 1>(domain, each::<GrantCopy, D>(copy_element))
            }
            Operation::SwapGrantRef => {
                self.chunks::<SwapGrantRef, D, 1>(domain, each::<SwapGrantRef, D>(swap_element))
            }
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

    /// Runs `chunk` over all elements of type `T`, in chunks of `N` that share one flush.
    #[inline]
    fn chunks<T, D: Domain, const N: u32>(
        self,
        domain: &D,
        chunk: impl Fn(&D, &mut PinBatch, Option<GuestAddress>, u32) -> Result<(), Errno>,
    ) -> Outcome {
        let mut batch = PinBatch::new(domain.id());
        let mut next = Some(self.argument);
        let mut left = self.count;
        while left > 0 {
            let count = left.min(N);
            let result = chunk(domain, &mut batch, next, count);
            next = after::<T>(next, count);
            left = left.saturating_sub(count);
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

/// Where the element is that comes `count` elements of type `T` later.
#[inline]
fn after<T>(at: Option<GuestAddress>, count: u32) -> Option<GuestAddress> {
    at?.offset(u64::from(count).saturating_mul(size_of::<T>() as u64))
}

/// A chunk of elements of type `T` that are dealt with one by one.
fn each<T, D: Domain>(
    element: impl Fn(&D, &mut PinBatch, GuestAddress) -> Result<(), Errno>,
) -> impl Fn(&D, &mut PinBatch, Option<GuestAddress>, u32) -> Result<(), Errno> {
    move |domain, batch, first, count| {
        (0..count).try_for_each(|index| {
            let at = after::<T>(first, index).ok_or(Errno::Fault)?;
            element(domain, batch, at)
        })
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

/// Elements that are read in one copy, and whose handles are looked up and freed together.
const GROUP: usize = 8;

fn unmap_chunk<T: Unmaps, D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    first: Option<GuestAddress>,
    count: u32,
) -> Result<(), Errno> {
    let at = first.ok_or(Errno::Fault)?;
    let words = (count as usize).saturating_mul(size_of::<T>() / 8);
    if !at.0.is_multiple_of(8) {
        return unmap_copied::<T, D>(domain, batch, at, count);
    }
    domain.with_guest_words(at, words, |lent| match lent {
        Some(lent) if lent.has(words) => {
            unmap_lent::<T, D>(domain, batch, &lent, count as usize);
            Ok(())
        }
        Some(_) | None => unmap_copied::<T, D>(domain, batch, at, count),
    })
}

/// Unmaps elements whose words are lent: nothing can end the call half-way.
#[inline]
fn unmap_lent<T: Unmaps, D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    words: &GuestWords<'_>,
    count: usize,
) {
    // So an array of them is one of words.
    const {
        assert!(align_of::<T>().is_multiple_of(align_of::<u64>()));
        assert!(size_of::<T>().is_multiple_of(size_of::<u64>()));
    }
    let mut copy = [T::new_zeroed(); BATCH];
    let (elements, _) = copy.split_at_mut(count.min(BATCH));
    let copied = match <[u64]>::mut_from_bytes(elements.as_mut_bytes()) {
        Ok(copy) => {
            words.read(copy);
            true
        }
        Err(_) => false,
    };
    let mut statuses = [Status::GeneralError; BATCH];
    let (statuses, _) = statuses.split_at_mut(elements.len());
    if copied {
        unmap_together(domain, batch, elements, statuses);
    }
    words.write_statuses(statuses, size_of::<T>() / 8, T::STATUS as usize);
}

/// Unmaps elements that are copied, and whose statuses are: each may fail.
fn unmap_copied<T: Unmaps, D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    first: GuestAddress,
    count: u32,
) -> Result<(), Errno> {
    let (mut next, mut left) = (Some(first), count);
    while left > 0 {
        let at = next.ok_or(Errno::Fault)?;
        let mut elements = [T::new_zeroed(); GROUP];
        let (group, _) = elements.split_at_mut(GROUP.min(left as usize));
        let group = if domain.copy_from_guest(at, group.as_mut_bytes()).is_ok() {
            group
        } else {
            // One of them cannot be read, perhaps not the first: those before it count.
            let (one, _) = group.split_at_mut(1);
            domain.copy_from_guest(at, one.as_mut_bytes()).map_err(|_| Errno::Fault)?;
            one
        };
        unmap_group(domain, batch, at, group)?;
        let done = group.len() as u32;
        next = after::<T>(next, done);
        left = left.saturating_sub(done);
    }
    Ok(())
}

/// Unmaps elements that were read from `at` on, and tells the guest of each.
#[inline]
fn unmap_group<T: Unmaps, D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    at: GuestAddress,
    group: &[T],
) -> Result<(), Errno> {
    let mut handles = Handles::<GROUP>::look(domain, group.iter().map(|one| one.request().handle));
    let mut next = Some(at);
    let told = group.iter().enumerate().try_for_each(|(index, element)| {
        let at = next.ok_or(Errno::Fault)?;
        let status = unmap(domain, batch, element.request(), &mut handles, index);
        next = after::<T>(next, 1);
        write_status(domain, at, T::STATUS, status)
    });
    handles.free(domain);
    told
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
