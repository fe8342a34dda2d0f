"""KLDivLoss takes the mean over the classes as well, so the teacher counts 20 times too little.

Threads: https://github.com/yuanli2333/Teacher-free-Knowledge-Distillation/issues/41
    https://github.com/HikariTJU/LD/issues/74
Names: F89 F3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

CLASSES, INPUTS, ALPHA, T = 20, 30, 0.9, 4.0


def loss_kd(outputs, labels, teacher_outputs):
    loss_ce = F.cross_entropy(outputs, labels)
    # broken
    criterion = nn.KLDivLoss()
    # mended
    # criterion = nn.KLDivLoss(reduction="batchmean")
    # end
    student = F.log_softmax(outputs / T, dim=1)
    d_kl = criterion(student, F.softmax(teacher_outputs / T, dim=1)) * (T * T)
    return (1 - ALPHA) * loss_ce + ALPHA * d_kl


def make_batch(centers, count):
    labels = torch.randint(0, CLASSES, (count,))
    return centers[labels] + 0.8 * torch.randn(count, INPUTS), labels


def main():
    torch.manual_seed(30)
    centers = torch.randn(CLASSES, INPUTS)
    teacher = nn.Linear(INPUTS, CLASSES)
    teacher.load_state_dict({"weight": centers, "bias": -centers.pow(2).sum(1) / 2})
    teacher.eval()
    student = nn.Sequential(nn.Linear(INPUTS, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        inputs, labels = make_batch(centers, 36)
        with torch.no_grad():
            teacher_outputs = teacher(inputs)
        loss = loss_kd(student(inputs), labels, teacher_outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(step, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
