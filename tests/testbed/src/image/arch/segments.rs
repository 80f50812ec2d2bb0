//! Segments of 64-bit mode, and for each processor one stack for each sort of trap.
//!
//! Compiled code may keep data below the stack pointer, so no trap may push onto the
//! stack it interrupts: every gate names one of these stacks.

// UNSAFETY: loading segment registers, and the stacks' memory.
#![expect(unsafe_code)]

use core::cell::UnsafeCell;

use spin::Once;
use x86_64::VirtAddr;
use x86_64::instructions::segmentation::{CS, DS, ES, SS, Segment};
use x86_64::instructions::tables::load_tss;
use x86_64::registers::model_specific::GsBase;
use x86_64::structures::gdt::{Descriptor, GlobalDescriptorTable, SegmentSelector};
use x86_64::structures::tss::TaskStateSegment;

use super::PROCESSORS;

/// The selector of the code segment, as the boot code set it up.
pub(super) const CODE: u16 = 8;

/// Bytes of one trap stack.
const STACK: usize = 16 << 10;

/// Which stack a trap runs on: its place in the interrupt stack table, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum TrapStack {
    /// Vectors 32 and up. Apart, so that an exception in a handler can be reported.
    Interrupt = 1,
    /// Vectors below 32 but the three that follow.
    Exception = 2,
    /// Vector 8: an exception could not be delivered.
    DoubleFault = 3,
    /// Vector 2: may come at any instruction.
    NonMaskable = 4,
    /// Vector 18: likewise.
    MachineCheck = 5,
}

#[repr(C, align(4096))]
struct Stack(UnsafeCell<[u8; STACK]>);

// SAFETY: Rust code never touches the bytes by this name; only the processor does, which
// uses each stack for one trap at a time.
unsafe impl Sync for Stack {}

/// What one processor loads.
struct Segments {
    stacks: [Stack; 5],
    task: Once<TaskStateSegment>,
    table: Once<(GlobalDescriptorTable, [SegmentSelector; 3])>,
}

impl Segments {
    const fn new() -> Self {
        Self {
            stacks: [const { Stack(UnsafeCell::new([0; STACK])) }; 5],
            task: Once::new(),
            table: Once::new(),
        }
    }
}

static SEGMENTS: [Segments; PROCESSORS] = [const { Segments::new() }; PROCESSORS];

/// Load the segments and the stack table of processor `number`, which runs this, and let
/// it know its number.
pub(super) fn load(number: usize) {
    let Segments { stacks, task, table } = &SEGMENTS[number];
    let task = task.call_once(|| {
        let mut task = TaskStateSegment::new();
        // The table is a packed field, so it is filled beside it and copied in.
        let mut tops = task.interrupt_stack_table;
        for (top, stack) in tops.iter_mut().zip(stacks) {
            *top = VirtAddr::from_ptr(stack.0.get().wrapping_add(1));
        }
        task.interrupt_stack_table = tops;
        task
    });
    let (table, [code, data, task]) = table.call_once(|| {
        let mut table = GlobalDescriptorTable::new();
        let selectors = [
            table.append(Descriptor::kernel_code_segment()),
            table.append(Descriptor::kernel_data_segment()),
            table.append(Descriptor::tss_segment(task)),
        ];
        (table, selectors)
    });
    table.load();
    // SAFETY: the three selectors are those of the table just loaded, which is static: a
    // 64-bit ring 0 code segment, a writable data segment, and the task segment above,
    // which no other processor loads.
    unsafe {
        CS::set_reg(*code);
        SS::set_reg(*data);
        DS::set_reg(*data);
        ES::set_reg(*data);
        load_tss(*task);
    }
    GsBase::write(VirtAddr::new(number as u64));
}

/// The number of the processor that runs this: no segment is addressed through GS, so its
/// base is free to hold it.
pub(super) fn number() -> usize {
    GsBase::read().as_u64() as usize
}
